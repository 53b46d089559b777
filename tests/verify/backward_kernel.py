"""A model of a backward kernel in NumPy: tiles, base-2 exponentials, fp32 sums in any
order; and the mistakes that such a kernel could make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.backward_reference import BackwardInputs
from flashsmith.verify.gradients import Rows

LOG2E = np.float32(math.log2(math.e))
# Every mistake, and what a problem must have for it to matter.
MUTANTS = {
    "no D": "", "no dlse": "dlse", "dlse added": "dlse", "D of rounded dP": "",
    "dq without scale": "", "dq scaled twice": "", "dk without scale": "", "dk scaled twice": "",
    "dv scaled": "", "scores scaled twice": "", "scores without scale": "",
    "no factor of the cap": "softcap", "the factor of the unscaled score": "softcap",
    "the cap's factor twice": "softcap", "no cap": "softcap",
    "keys of another group": "group", "the group's last head alone": "group",
    "the group's sum in 16 bits": "group",
    "no dsinks": "sinks", "dsinks added": "sinks", "dsinks without dlse": "sinks dlse",
    "dsinks of base e": "sinks", "dsinks of the last sequence": "sinks batch",
    "one key more": "mask", "one key less on the left": "left", "aligned to the top left": "mask",
    "the last key left out": "", "no mask": "mask",
    "lse rounded to 16 bits": "", "lse off by 1e-3": "", "lse of base e": "",
    "P of the row's maximum": "", "P rounded towards 0": "", "dS rounded towards 0": "",
    "P in 8 bits": "", "dS of the rounded P": "", "dq summed in 16 bits": "tiles",
    "dP without v's last column": "",
    "dq without the last keys": "tiles", "dk without the first rows": "tiles",
    "dv of the next row's do": "", "do of rows without keys": "dead",
    "rows behind sequences unwritten": "outside", "rows behind sequences kept": "outside",
    "rows of the next sequence": "next", "the neighbours' rows multiplied by 0": "next",
    "rows without keys not 0": "dead", "dk for dv": "",
}  # fmt: skip


def matters(mutant: str, case: BackwardInputs, problem: Problem) -> bool:
    """Whether a problem has what a mutant is about."""
    tensors, attention = case.tensors, case.attention
    q_rows = sum(rows.q.stop - rows.q.start for rows in case.sequences)
    dead = False
    for rows in case.sequences:
        first, end = _visible(rows, attention, "")
        dead |= bool((end <= first).any())
    has = {
        "dlse": "dlse" in tensors,
        "softcap": attention.softcap > 0,
        "group": problem.heads_q > problem.heads_k,
        "sinks": "sinks" in tensors,
        "batch": len(case.sequences) > 1,
        "mask": attention.masked,
        "left": attention.window[0] is not None,
        "tiles": problem.seq_q > 32 and problem.seq_k > 32,
        "dead": dead,
        "outside": q_rows < math.prod(tensors["q"].shape[:-2]),
        "next": problem.semantics.packed,
    }
    return all(has[word] for word in MUTANTS[mutant].split())


def _visible(rows: Rows, attention: Attention, mutant: str) -> tuple[np.ndarray, np.ndarray]:
    seq_q, seq_k = rows.q.stop - rows.q.start, rows.k.stop - rows.k.start
    row, shift = np.arange(seq_q), seq_k - seq_q
    if mutant == "aligned to the top left":
        shift = 0
    left, right = attention.window
    right = 0 if attention.causal else right
    if mutant == "no mask":
        left = right = None
    if mutant == "one key more" and right is not None:
        right += 1
    if mutant == "one key less on the left" and left is not None:
        left -= 1
    first = np.zeros_like(row) if left is None else np.clip(row + shift - left, 0, seq_k)
    end = np.full_like(row, seq_k) if right is None else np.clip(row + shift + right + 1, 0, seq_k)
    if mutant == "the last key left out":
        end = np.minimum(end, seq_k - 1)
    return first, np.maximum(first, end)


def kernel_gradients(
    case: BackwardInputs,
    problem: Problem,
    *,
    fp32: bool = False,
    seed: int = 0,
    mutant: str = "",
) -> dict[str, np.ndarray]:
    """dq, dk, dv and, with sinks, dsinks as a kernel of random tiles gives them."""
    tensors, rng = case.tensors, np.random.default_rng(seed)
    fill = math.nan if mutant == "rows behind sequences unwritten" else 0.0
    wide = {name: np.full(tensors[name[1:]].shape, fill, np.float32) for name in ("dq", "dk", "dv")}
    if mutant == "rows behind sequences kept":
        wide["dq"][:] = 1e-3
    dsinks = np.zeros(problem.heads_q, np.float32)
    tiles = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    with np.errstate(all="ignore"):
        for rows in case.sequences:
            for name, part in (("dq", rows.of_queries), ("dk", rows.of_keys), ("dv", rows.of_keys)):
                part(wide[name])[:] = 0.0
            for head in range(problem.heads_q):
                found = _Head(case, problem, rows, head, tiles, rng, mutant).run()
                rows.of_queries(wide["dq"])[:, head] = found["dq"]
                kv = head * problem.heads_k // problem.heads_q
                for name in ("dk", "dv"):
                    out = rows.of_keys(wide[name])
                    if mutant == "the group's last head alone":
                        out[:, kv] = 0.0
                    out[:, kv] += found[name]
                    if mutant == "the group's sum in 16 bits":
                        out[:, kv] = out[:, kv].astype(tensors["q"].dtype)
                if mutant == "dsinks of the last sequence":
                    dsinks[head] = 0.0
                dsinks[head] += found["dsinks"]
        dtype = np.float32 if fp32 else tensors["q"].dtype
        outputs = {name: array.astype(dtype) for name, array in wide.items()}
    if mutant == "dk for dv":
        outputs["dv"] = outputs["dk"]
    return outputs | ({"dsinks": dsinks} if "sinks" in tensors else {})


class _Head:
    """One head of one sequence."""

    def __init__(
        self,
        case: BackwardInputs,
        problem: Problem,
        rows: Rows,
        head: int,
        tiles: tuple[int, int],
        rng: np.random.Generator,
        mutant: str,
    ) -> None:
        self.attention, self.mutant, self.tiles, self.rng = case.attention, mutant, tiles, rng
        self.dtype = case.tensors["q"].dtype
        self.first, self.end = _visible(rows, case.attention, mutant)
        kv = head * problem.heads_k // problem.heads_q
        if mutant == "keys of another group":
            kv = head % problem.heads_k
        next_rows = rows
        if mutant == "rows of the next sequence":
            next_rows = rows._replace(q=slice(rows.q.start + 1, rows.q.stop + 1))
        tensors: Mapping[str, Any] = case.tensors
        self.seq_q, self.seq_k = rows.q.stop - rows.q.start, rows.k.stop - rows.k.start
        self.q, self.o = (
            rows.of_queries(tensors[name])[:, head].astype(np.float32) for name in ("q", "o")
        )
        self.do = next_rows.of_queries(tensors["do"])[:, head].astype(np.float32)
        if len(self.do) < self.seq_q:
            self.do = np.pad(self.do, ((0, self.seq_q - len(self.do)), (0, 0)))
        self.k, self.v = (
            rows.of_keys(tensors[name])[:, kv].astype(np.float32) for name in ("k", "v")
        )
        lse = rows.of_statistics(tensors["lse"])[head]
        self.dlse = np.zeros_like(lse)
        if "dlse" in tensors:
            self.dlse = rows.of_statistics(tensors["dlse"])[head]
        self.sink = tensors["sinks"][head] if "sinks" in tensors else np.float32(-math.inf)
        if mutant == "lse rounded to 16 bits":
            lse = lse.astype(self.dtype).astype(np.float32)
        if mutant == "lse off by 1e-3":
            lse = lse + np.float32(1e-3)
        self.lse = np.where(np.isneginf(lse), np.float32(math.inf), lse)
        self.tail = np.zeros((0, self.q.shape[1]), np.float32)
        if mutant == "the neighbours' rows multiplied by 0" and rows.batch is None:
            behind = slice(rows.q.stop, rows.q.stop + tiles[0])
            self.tail = case.tensors["do"][behind, head].astype(np.float32)

    def run(self) -> dict[str, Any]:
        mutant, scale = self.mutant, np.float32(self.attention.scale)
        dead = (self.end <= self.first)[:, None]
        products = np.where(self.o == 0, 0, self.do * self.o)
        sums = products.sum(-1, dtype=np.float32)
        if mutant == "D of rounded dP":
            sums = sums.astype(self.dtype).astype(np.float32) * np.float32(1.01)
        d_row = {
            "no dlse": sums, "dlse added": sums + self.dlse, "no D": -self.dlse
        }.get(mutant, sums - self.dlse)  # fmt: skip
        of_sinks = sums if mutant == "dsinks without dlse" else d_row
        lse2 = self.lse * LOG2E
        sink2 = self.sink * (1 if mutant == "dsinks of base e" else LOG2E)
        share = np.exp2(sink2 - lse2)
        if mutant == "lse of base e":
            lse2 = self.lse
        q, do = self.q, self.do
        if mutant != "do of rows without keys":
            q, do = np.where(dead, 0, q), np.where(dead, 0, do)
        d_row = np.where(dead[:, 0], 0, d_row)
        dq = np.zeros_like(self.q)
        dk, dv = np.zeros_like(self.k), np.zeros_like(self.v)
        starts = np.arange(0, self.seq_k, self.tiles[1])
        for k0 in self.rng.permutation(starts):
            keys = slice(int(k0), min(int(k0) + self.tiles[1], self.seq_k))
            for q0 in range(0, self.seq_q, self.tiles[0]):
                block = slice(q0, min(q0 + self.tiles[0], self.seq_q))
                p, ds = self._tile(q, do, d_row, lse2, block, keys)
                if not (mutant == "dk without the first rows" and q0 == 0):
                    dk[keys] += ds.T @ q[block]
                its_do = np.roll(do, 1, axis=0) if mutant == "dv of the next row's do" else do
                dv[keys] += p.T @ its_do[block]
                if not (mutant == "dq without the last keys" and k0 == starts[-1]):
                    dq[block] += ds @ self.k[keys]
                if mutant == "dq summed in 16 bits":
                    dq[block] = dq[block].astype(self.dtype).astype(np.float32)
            if len(self.tail):
                dv[keys] += np.zeros((keys.stop - keys.start, len(self.tail)), np.float32) @ (
                    self.tail
                )
        factor = {"without scale": np.float32(1), "scaled twice": scale * scale}
        dq *= factor.get(mutant.removeprefix("dq "), scale)
        dk *= factor.get(mutant.removeprefix("dk "), scale)
        if mutant == "dv scaled":
            dv *= scale
        if mutant == "rows without keys not 0":
            dq[dead[:, 0]] = 1e-6
        dsinks = np.float32(0 if mutant == "no dsinks" else (share * of_sinks).sum())
        return {
            "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks if mutant == "dsinks added" else -dsinks
        }  # fmt: skip

    def _tile(
        self,
        q: np.ndarray,
        do: np.ndarray,
        d_row: np.ndarray,
        lse2: np.ndarray,
        block: slice,
        keys: slice,
    ) -> tuple[np.ndarray, np.ndarray]:
        """P and dS of one tile, rounded to the dtype, in fp32."""
        mutant, cap = self.mutant, np.float32(self.attention.softcap)
        scale = np.float32(self.attention.scale)
        if mutant == "scores scaled twice":
            scale = scale * scale
        if mutant == "scores without scale":
            scale = np.float32(1)
        key = np.arange(keys.start, keys.stop)
        seen = (key >= self.first[block, None]) & (key < self.end[block, None])
        s = q[block] @ self.k[keys].T
        factor = np.float32(1)
        if cap and mutant != "no cap":
            t = np.tanh(s * (scale / cap))
            logits = t * (cap * LOG2E)
            of = np.tanh(s / cap) if mutant == "the factor of the unscaled score" else t
            factor = 1 - of * of
            factor = {
                "no factor of the cap": np.float32(1),
                "the cap's factor twice": factor**2,
            }.get(mutant, factor)
        else:
            logits = s * (scale * LOG2E)
        base = lse2[block, None]
        if mutant == "P of the row's maximum":
            base = np.where(seen, logits, -math.inf).max(-1, keepdims=True, initial=-1e30)
        p = np.where(seen, np.exp2(logits - base), 0).astype(np.float32)
        v = self.v[keys]
        if mutant == "dP without v's last column":
            v = np.where(np.arange(v.shape[1]) == v.shape[1] - 1, 0, v)
        dp = do[block] @ v.T
        its_p = self._rounded(p) if mutant == "dS of the rounded P" else p
        ds = np.where(seen, its_p * (dp - d_row[block, None]) * factor, 0).astype(np.float32)
        if mutant == "P in 8 bits":
            return self._rounded(np.round(p * 256) / 256), self._rounded(ds)
        return (
            self._rounded(p, mutant == "P rounded towards 0"),
            self._rounded(ds, mutant == "dS rounded towards 0"),
        )

    def _rounded(self, x: np.ndarray, towards_zero: bool = False) -> np.ndarray:
        rounded = x.astype(self.dtype)
        if towards_zero:
            over = np.abs(rounded.astype(np.float32)) > np.abs(x)
            bits = rounded.view(np.uint16)
            rounded = np.where(over, bits - 1, bits).astype(np.uint16).view(self.dtype)
        return rounded.astype(np.float32)
