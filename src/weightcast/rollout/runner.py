"""Carries out the scheduler's commands on one rank's model and cache."""

from __future__ import annotations

import torch

from weightcast.rollout import commands
from weightcast.rollout.cache import SlotCache
from weightcast.rollout.model import ReferenceModel
from weightcast.rollout.sampling import choose

_HEAD_BYTES = 64 << 20  # largest block of logits when scoring


class Runner:
    """Runs one rank's forward passes; `dtype` is that of keys and values."""

    def __init__(
        self, model: ReferenceModel, *, max_batch: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = model.config
        self._model = model
        self._device = device
        self._dtype = dtype
        self._cache = SlotCache(
            num_layers=int(config.num_hidden_layers),
            num_slots=max_batch,
            num_kv_heads=int(config.num_key_value_heads) // model.tp_size,
            max_len=max_len,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
        )
        self._cache.allocate()

    @property
    def cache_bytes(self) -> int:
        return self._cache.size_bytes

    # No inference mode here: `Wake` makes tensors that an update later writes outside inference mode.
    @torch.no_grad()
    def run(self, command: commands.Command) -> commands.Chosen | commands.Scores | commands.Done:
        """Carries out one command; ranks other than 0 answer `Done`."""
        match command:
            case commands.Decode():
                self._move(command.moves)
                return self._choose(self._decode(command), command.sampling)
            case commands.Prefill():
                self._move(command.moves)
                return self._choose(self._prefill(command), command.sampling)
            case commands.Score():
                return self._score(command.rows)
            case commands.DropCache():
                self._cache.free()
                self._cache.allocate()
            case commands.Sleep():
                self._cache.free()
                self._model.offload()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            case commands.Wake():
                self._model.restore(self._device)
                self._cache.allocate()
            case commands.Ping() | commands.Describe():
                pass  # the worker describes itself
        return commands.Done()

    def _move(self, moves: list[commands.SlotCopy]) -> None:
        for move in moves:
            self._cache.copy(move.source, move.target, length=move.length)

    def _decode(self, command: commands.Decode) -> torch.Tensor:
        positions = torch.tensor(command.positions, device=self._device)
        length = max(command.positions) + 1
        self._cache.start_decode(positions, length=length)
        mask = torch.zeros(len(command.positions), length, dtype=self._dtype, device=self._device)
        mask.masked_fill_(torch.arange(length, device=self._device) > positions[:, None], -torch.inf)
        hidden = self._model.hidden(
            torch.tensor(command.tokens, device=self._device)[:, None],
            position_ids=positions[:, None],
            mask=mask[:, None, None],
            cache=self._cache,
        )
        return hidden[:, 0]

    def _prefill(self, command: commands.Prefill) -> torch.Tensor:
        lengths = [len(row) for row in command.rows]
        self._cache.start_prefill(first=command.first_slot, lengths=lengths)
        hidden = self._whole(command.rows, cache=self._cache)
        last = torch.tensor(lengths, device=self._device) - 1
        rows = hidden[torch.arange(len(lengths), device=self._device), last]
        slot = command.first_slot + len(lengths)
        for twin in command.twins:
            self._cache.copy(command.first_slot + twin, slot, length=lengths[twin])
            slot += 1
        return torch.cat([rows, rows[command.twins]]) if command.twins else rows

    def _whole(self, rows: list[list[int]], *, cache: SlotCache | None) -> torch.Tensor:
        """Hidden states of whole sequences, padded on the right, which causal attention ignores."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self._device)
        positions = torch.arange(longest, device=self._device)[None].expand(len(rows), longest)
        return self._model.hidden(ids, position_ids=positions, mask=None, cache=cache)

    def _choose(self, hidden: torch.Tensor, sampling: commands.Sampling) -> commands.Chosen | commands.Done:
        if self._model.tp_rank:
            return commands.Done()
        return choose(self._model.logits(hidden), sampling)

    def _score(self, rows: list[list[int]]) -> commands.Scores | commands.Done:
        scores: list[list[float]] = []
        for row in rows:
            hidden = self._whole([row], cache=None)[0, :-1]
            if self._model.tp_rank:
                continue
            targets = torch.tensor(row[1:], device=self._device)
            step = max(1, _HEAD_BYTES // (4 * int(self._model.config.vocab_size)))
            found: list[float] = []
            for start in range(0, len(targets), step):
                logprobs = self._model.logits(hidden[start : start + step]).log_softmax(dim=-1)
                found += logprobs.gather(1, targets[start : start + step, None])[:, 0].tolist()
            scores.append(found)
        return commands.Done() if self._model.tp_rank else commands.Scores(rows=scores)
