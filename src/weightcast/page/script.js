(() => {
  const root = document.documentElement;
  const button = document.querySelector("#theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
  const tip = document.querySelector("#tip");
  document.addEventListener("pointermove", (event) => {
    const found = event.target.closest?.("[data-tip]");
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.textContent = found.dataset.tip;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - 14 - box.height : event.clientY + 14;
    tip.style.left = `${Math.max(4, x)}px`;
    tip.style.top = `${Math.max(4, y)}px`;
  });
})();
