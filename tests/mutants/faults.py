"""The faults: three a stage, of the kinds that have broken systems like this one."""

from __future__ import annotations

from dataclasses import dataclass

_REFERENCE = "tests/distributed/test_against_reference.py"
_PARALLEL = "tests/distributed/test_parallel.py"
_CHECKPOINT = "tests/distributed/test_checkpoint.py"
_RESUME = "tests/distributed/test_checkpoint_resume.py"
_QUANTISED = "tests/regressions/test_quantised.py"


@dataclass(frozen=True)
class Fault:
    """A change that makes the library wrong.

    Attributes:
        stage: of the flow.
        what: the fault in words.
        file: below the package.
        old: text that is in the file once.
        new: what takes its place.
        tests: pytest's arguments; one of these tests must fail.
    """

    stage: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "describe",
        "blocks of a fused matrix are divided as one",
        "optimizer/boxes.py",
        "        parts = (*blocks, rest) if rest else blocks",
        "        parts = (extent,)",
        (_CHECKPOINT,),
    ),
    Fault(
        "describe",
        "a divided stack begins at the wrong expert",
        "optimizer/boxes.py",
        "offset = part * shape[0]",
        "offset = max(0, part * shape[0] - 1)",
        ("tests/unit/test_checkpoint_runs.py",),
    ),
    Fault(
        "layout",
        "a slot begins one element late in its parameter",
        "optimizer/layout.py",
        "param_start=done,",
        "param_start=done + (done > 0),",
        ("tests/unit/test_layout.py",),
    ),
    Fault(
        "layout",
        "padding of a row is one element short",
        "optimizer/layout.py",
        "return tuple((start - low, stop - low) for start, stop in clipped if start < stop)",
        "return tuple((start - low, stop - low - 1) for start, stop in clipped if start < stop)",
        ("tests/unit/test_checkpoint_runs.py", "tests/unit/test_layout.py"),
    ),
    Fault(
        "buffers",
        "clearing leaves the gradients of the step before",
        "distributed/buffers.py",
        "if self.grad_state is not GradState.EMPTY:\n            self.grads.zero_()\n",
        "if self.grad_state is not GradState.EMPTY:\n",
        (_REFERENCE,),
    ),
    Fault(
        "buffers",
        "a gradient takes the place of the one before",
        "distributed/buffers.py",
        "self._main_grads[name].add_(",
        "self._main_grads[name].copy_(",
        ("tests/distributed/test_ddp.py",),
    ),
    Fault(
        "reduce",
        "gradients are summed and not averaged",
        "distributed/reduce.py",
        "        row.div_(divisor)",
        "        pass",
        (_REFERENCE,),
    ),
    Fault(
        "reduce",
        "sequence-parallel gradients are not summed",
        "distributed/finalize.py",
        "        _sum_over_tensor_parallel(chunk, groups.tp)\n",
        "",
        (_PARALLEL,),
    ),
    Fault(
        "reduce",
        "copies of a tied weight keep their own gradients",
        "distributed/finalize.py",
        "        _sum_over_stages(chunk, groups.embedding)\n",
        "",
        (_PARALLEL,),
    ),
    Fault(
        "stats",
        "padding is counted as zeros",
        "optimizer/stats.py",
        "grads.numel() - run.padding - torch.count_nonzero(grads)",
        "grads.numel() - torch.count_nonzero(grads)",
        (_REFERENCE,),
    ),
    Fault(
        "stats",
        "tensor-parallel replicas are counted on every rank",
        "optimizer/build.py",
        "        if info.tp_dim is None and tensor.rank > 0:\n            return 0\n",
        "",
        (_PARALLEL, "tests/regressions/test_norm.py"),
    ),
    Fault(
        "stats",
        "a tied weight is counted on both stages",
        "optimizer/build.py",
        "        if info.tied is not None and groups.embedding.rank > 0:\n            return 0\n",
        "",
        ("tests/regressions/test_norm.py",),
    ),
    Fault(
        "step",
        "gradients are not clipped",
        "optimizer/stats.py",
        "                bucket.grad_row.mul_(clip * inverse_scale)",
        "                pass",
        (_REFERENCE,),
    ),
    Fault(
        "step",
        "a step with a gradient that is not finite is taken",
        "optimizer/step.py",
        "return measured.finite and norm <= self.config.grad_norm_skip_threshold",
        "return True",
        ("tests/distributed/test_nonfinite.py",),
    ),
    Fault(
        "step",
        "weights are published after a child has failed",
        "optimizer/step.py",
        '            self._guard.agree(kept.error, "the step failed half-way")',
        "            pass",
        ("tests/distributed/test_faults.py",),
    ),
    Fault(
        "publish",
        "a rank that cannot publish tells nobody",
        "optimizer/step.py",
        '        self._guard.agree(kept.error, "the weights are not published")',
        "        kept.raise_kept()",
        ("tests/distributed/test_faults.py",),
    ),
    Fault(
        "masters",
        "weights that were loaded do not reach the masters",
        "distributed/ddp.py",
        "        if self._stale:\n            self.reload_masters()",
        "        if False:\n            self.reload_masters()",
        ("tests/distributed/test_ddp.py", "tests/distributed/test_robustness.py"),
    ),
    Fault(
        "adam",
        "weight decay is left out",
        "optimizer/children/adam.py",
        'weight_decay=float(group["weight_decay"]) if mode == "decoupled" else 0.0,',
        "weight_decay=0.0,",
        (_REFERENCE,),
    ),
    Fault(
        "muon",
        "Nesterov looks ahead with the wrong share",
        "optimizer/children/muon.py",
        "out.copy_(torch.lerp(grad, momentum, beta, out=scratch))",
        "out.copy_(torch.lerp(grad, momentum, 1 - beta, out=scratch))",
        ("tests/unit/test_single_process_oracles.py", _REFERENCE),
    ),
    Fault(
        "muon",
        "rows and columns are swapped in the scale",
        "optimizer/children/muon.py",
        "return math.sqrt(rows / columns)",
        "return math.sqrt(columns / rows)",
        ("tests/unit/test_scale_modes.py",),
    ),
    Fault(
        "gather",
        "weights are not cast from the new masters",
        "distributed/gather.py",
        "        self._row.copy_(master)",
        "        pass",
        (_REFERENCE,),
    ),
    Fault(
        "gather",
        "a packed row is landed one slot short",
        "distributed/gather.py",
        "        for place, wire in self._landings:\n",
        "        for place, wire in self._landings[1:]:\n",
        ("tests/regressions/test_construction.py", "tests/distributed/test_ddp.py"),
    ),
    Fault(
        "gather",
        "a reader does not wait for the weight that it reads",
        "distributed/gather.py",
        "            self.handle.wait()\n            self.wire.land()",
        "            self.wire.land()",
        ("tests/regressions/test_publish.py", "tests/distributed/test_overlap.py"),
    ),
    Fault(
        "checkpoint",
        "a piece begins one row late in its logical tensor",
        "dist_checkpointing/runs.py",
        "at - low + world",
        "at - low + world + (world > 0)",
        ("tests/unit/test_checkpoint_runs.py",),
    ),
    Fault(
        "checkpoint",
        "weights are not published after a load",
        "optimizer/step.py",
        "            self._publish(Kept())\n",
        "",
        (_RESUME,),
    ),
    Fault(
        "checkpoint",
        "step counts are not restored",
        "dist_checkpointing/load.py",
        "        bucket.child.num_steps = 0 if saved is None else saved.num_steps\n",
        "",
        (_RESUME,),
    ),
    Fault(
        "checkpoint",
        "padding keeps what it held",
        "dist_checkpointing/load.py",
        "                row[start:stop].zero_()",
        "                pass",
        (_CHECKPOINT,),
    ),
    Fault(
        "checkpoint",
        "unknown keys are passed over",
        "dist_checkpointing/match.py",
        "    if unknown:\n",
        "    if False:\n",
        (_RESUME,),
    ),
    Fault(
        "checkpoint",
        "copies that differ are saved",
        "dist_checkpointing/copies.py",
        "        if len(set(digests)) > 1:\n",
        "        if False:\n",
        (_RESUME,),
    ),
    Fault(
        "masters",
        "every part of a cut weight starts from its first elements",
        "optimizer/masters.py",
        "part = weight[slot.param_start : slot.param_start + slot.numel]",
        "part = weight[: slot.numel]",
        (_REFERENCE,),
    ),
    Fault(
        "adam",
        "the bias correction is of the step before",
        "optimizer/children/elementwise.py",
        "        self.num_steps += 1\n        rows",
        "        self.num_steps += 1 + (self.num_steps > 0)\n        rows",
        (_REFERENCE,),
    ),
    Fault(
        "adam",
        "the decay rates of the two moments are exchanged",
        "optimizer/children/adam.py",
        'betas=group["betas"],',
        'betas=group["betas"][::-1],',
        (_REFERENCE,),
    ),
    Fault(
        "buffers",
        "zeros that were asked for during a gather are forgotten",
        "distributed/buffers.py",
        "            if self.grad_state is GradState.EMPTY:\n                self.grads.zero_()",
        "            if False:\n                self.grads.zero_()",
        (_QUANTISED,),
    ),
    Fault(
        "fp8",
        "the column-wise plane stays as it was",
        "fp8/wire.py",
        '            if each.way in ("fp8", "rows"):\n                derive_columns',
        '            if each.way == "rows":\n                derive_columns',
        (_QUANTISED,),
    ),
    Fault(
        "fp8",
        "what travels is quantised from the fp32 masters",
        "fp8/wire.py",
        "self._values = master.to(torch.bfloat16)",
        "self._values = master.clone()",
        (_QUANTISED,),
    ),
    Fault(
        "fp8",
        "ranks do not agree on the maxima of what is cut",
        "distributed/gather.py",
        "        if maxima is not None and maxima.numel():",
        "        if maxima is None:",
        ("tests/distributed/test_fp8.py", _QUANTISED),
    ),
    Fault(
        "fp8",
        "a buffer of Transformer Engine is taken for a view of ours, whoever has replaced it",
        "fp8/te.py",
        "            if source.data_ptr() != target.data_ptr():",
        '            if not each.endswith("data"):',
        ("tests/unit/test_fp8_te_views.py",),
    ),
    Fault(
        "checkpoint",
        "a save in the midst of a step leaves ranks at different reduces",
        "distributed/finalize.py",
        "    if begun.item():",
        "    if False:",
        ("tests/regressions/test_found.py",),
    ),
)
