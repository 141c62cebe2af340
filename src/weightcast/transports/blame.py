"""Finds the engines that a failed step failed because of, and raises one error that names all of them.

An update that names one engine at a time costs an attempt for each.  So a step that talks to many engines collects
every engine's failure and raises one error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from weightcast.comm import event_loop
from weightcast.comm.update_group import WHERE_TO_LOOK, GroupFailed
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, TargetsFailed, WeightcastError
from weightcast.transports.link import Link
from weightcast.wire.answers import GROUP_FAILED, MAPPING_FAILED
from weightcast.wire.engine_info import EngineInfo

_LATE_S = 10.0  # engines keep the deadline themselves; an engine that has not answered this much later is lost


def engine_of(error: BaseException) -> str:
    """Returns the URL of the engine that an error is about; empty if the error names none."""
    url = getattr(error, "url", None) or getattr(error, "who", None)
    return url if isinstance(url, str) else ""


def failures_of(error: BaseException) -> tuple[WeightcastError, ...]:
    """Returns the failures in an error, one for each engine; none if the error names no engine."""
    if isinstance(error, TargetsFailed):
        return error.failures
    return (error,) if isinstance(error, WeightcastError) and engine_of(error) else ()


def together(errors: Iterable[BaseException | None]) -> BaseException | None:
    """Joins the errors of one step, in the order of the engines, into one; None if there is none.

    An exception from outside this package comes first, because it is a bug or an interrupt.  Where an engine is to
    blame, errors without an engine are left out, and so are engines that report only a failed group.  An engine's first
    error counts.
    """
    found = [error for error in errors if error is not None]
    for error in found:
        if not isinstance(error, WeightcastError):
            return error
    failures: dict[str, WeightcastError] = {}
    for error in found:
        for failure in failures_of(error):
            failures.setdefault(engine_of(failure), failure)
    own = [failure for failure in failures.values() if not only_its_group(failure)]
    named = own or list(failures.values())[:1]
    if len(named) > 1:
        return TargetsFailed(named)
    return named[0] if named else next(iter(found), None)


def raise_together(errors: Iterable[BaseException | None]) -> None:
    """Raises the error that ``together`` returns, if any."""
    error = together(errors)
    if error is not None:
        raise error


def try_each(do: Callable[[Link], Coroutine[Any, Any, object]], links: Sequence[Link]) -> list[BaseException | None]:
    """Runs ``do`` on every link at once, on the event loop, and returns each link's error, in order."""
    return event_loop.run_each([do(link) for link in links])


async def each_on_loop(do: Callable[[Link], Coroutine[Any, Any, object]], links: Sequence[Link]) -> None:
    """As ``run_each``, on the event loop."""
    raise_together(await event_loop.together([do(link) for link in links]))


def start_each(do: Callable[[Link], Coroutine[Any, Any, object]], links: Sequence[Link]) -> list[Future[object]]:
    """Starts ``do`` on every link; returns once each has sent what it can send without an answer."""
    started = event_loop.submit([do(link) for link in links])
    event_loop.flush()
    return started


def wait_each(started: Sequence[Future[object]]) -> None:
    """Waits for all that was started; raises as ``run_each``."""
    raise_together([future.exception() for future in started])


def run_each(do: Callable[[Link], Coroutine[Any, Any, object]], links: Sequence[Link]) -> None:
    """As ``try_each``; raises after all have ended, and the error names every engine that failed."""
    raise_together(try_each(do, links))


def is_the_transports(error: WeightcastError, link: Link) -> bool:
    """True if an engine refused because of the transport, so that another one may reach it.

    An engine with our receiver says so by its status.  A stock engine has one status for everything.
    """
    if not isinstance(error, TargetRejected):
        return False
    return not link.info.has_receiver or error.status in (MAPPING_FAILED, GROUP_FAILED)


def only_its_group(error: WeightcastError) -> bool:
    """True if an engine with our receiver says that its group failed, so that another member may be to blame."""
    return isinstance(error, TargetRejected) and error.status == GROUP_FAILED


def find_culprit(
    error: BaseException,
    answers: Sequence[Future[None]],
    what: str,
    *,
    links: Sequence[Link],
    timeout_s: float,
    tells_group_failure: bool,
    first: Sequence[Future[None]] = (),
    absent: Mapping[str, Sequence[int]] | None = None,
) -> BaseException:
    """Returns the error that names the engines a step of a group failed because of.

    When one member of a group dies, all the others fail too, and may report it first.  An engine with our receiver says
    by its status whether only its group failed (``tells_group_failure``).  So every other refusal counts, beside every
    engine that is lost.

    Stock engines have one status for everything.  Answers that they give after the group was aborted follow from the
    abort.  Such an answer counts only if none is in ``first``.  A refusal counts only if no engine is lost.

    Engines in ``absent``, whose ranks did not come to the rendezvous, count if no engine is lost or refuses.  The
    ``answers`` are in the order of ``links``; engines keep the deadline ``timeout_s``.
    """
    if not isinstance(error, Exception):
        return error
    stock = not tells_group_failure
    lost = dict[str, WeightcastError]()
    refusals = dict[str, TargetRejected]()
    early = set[str]()
    waiting = dict(zip(answers, links, strict=True))
    others = [answer for answer in answers if answer not in first]
    deadline = time.monotonic() + timeout_s + _LATE_S
    while waiting:
        due = [answer for answer in first if answer in waiting]
        if not due:
            # Stock engines may hang in a group that is gone.  Once one is to blame, the search stops waiting.
            known = stock and bool(lost or early)
            left_s = 0.0 if known else max(deadline - time.monotonic(), 0.0)
            due = list(wait([answer for answer in others if answer in waiting], left_s, FIRST_COMPLETED).done)
        if not due:
            break
        for answer in due:
            link, failure = waiting.pop(answer), answer.exception()
            if not isinstance(failure, WeightcastError) or only_its_group(failure):
                continue
            if isinstance(failure, TargetRejected):
                refusals[link.url] = failure
            else:
                lost[link.url] = failure
            if answer in first:
                early.add(link.url)
    if waiting and not (stock and (lost or early)):
        silent = (link.url for link in waiting.values())
        lost |= {url: TargetLost(f"{url}: silent during {what}", url=url) for url in silent}
    if stock:
        lost = {url: failure for url, failure in lost.items() if url in early or not early}
        guilty = [url for url in refusals if url in early] or list(refusals)[:1]
        refusals = {} if lost else {url: refusals[url] for url in guilty}
    blamed: dict[str, WeightcastError] = {**lost, **refusals}
    if blamed:
        found = together(blamed.get(link.url) for link in links)
        assert found is not None
        return found
    if absent:
        infos = {link.url: link.info for link in links}
        return _did_not_come(what, absent, infos, [answer.exception() for answer in first], error)
    group_failed = [answer.exception() for answer in answers if answer.done()]
    if len(links) == 1 and isinstance(group_failed[0], TargetRejected):
        return group_failed[0]
    return GroupFailed(f"{what}: {error}") if isinstance(error, TargetRejected) else error


def _did_not_come(
    group: str,
    absent: Mapping[str, Sequence[int]],
    infos: Mapping[str, EngineInfo],
    unprompted: Sequence[BaseException | None],
    error: Exception,
) -> TargetError:
    """Returns one error for all absent engines; one error at a time would cost a deadline each.

    ``unprompted`` came before the rendezvous was given up; later answers follow from that.
    """
    own_words = {refusal.url: refusal for refusal in unprompted if isinstance(refusal, TargetRejected)}
    limit = f" within {error.timeout_s:g} s" if isinstance(error, DeadlineExceeded) else ""
    found: list[TargetError] = []
    for url, ranks in absent.items():
        which = f"ranks {', '.join(map(str, ranks))}"
        if len(ranks) == 1 or infos[url].on_several_hosts:
            which = ", ".join(map(infos[url].named, ranks))
        words = f": {own_words[url]}" if url in own_words else limit
        own = error.hint if isinstance(error, WeightcastError) else None
        hint = (own_words[url].hint if url in own_words else None) or own or WHERE_TO_LOOK
        found.append(TargetError(f"{url}: {which} did not come to {group}{words}", url=url, hint=hint))
    return found[0] if len(found) == 1 else TargetsFailed(found)
