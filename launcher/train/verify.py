"""A few updates of a user's own model under every way of spreading it, against one process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.config.choices import (
    Device,
    Layout,
    Offload,
    PipelineSchedule,
    PrecisionName,
    Recompute,
    ReduceEach,
    Rule,
    StrategyName,
)
from launcher.config.decays import ConstantDecay
from launcher.config.parallel import MeshConfig, PipelineConfig, PrecisionConfig
from launcher.config.schema import Config, ScalingConfig, ScheduleConfig
from launcher.errors import ConfigError
from launcher.plan.durations import Every
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir, State, to_json, write_atomic
from launcher.train.parallel.mesh import Place, take_place
from launcher.train.parts import Parts, build_data, build_model, build_task, gather_facts, make_model
from launcher.train.patches import in_evaluation
from launcher.train.reading import Samples, collate, row_weights
from launcher.train.reporter import Progress, Reporter
from launcher.train.run import START_TIMEOUT, assemble, joined
from launcher.train.sharding.base import StepResult, row_losses
from launcher.train.verify_cells import Cell, pipelines, spread
from launcher.train.window import Window, to_device

MICRO_BATCH = 2
UPDATES = 3
STEP = 0.03
"""How far an update moves the parameters, as a share of their own norm."""
MOMENTUM = 0.9
LEAST_TOLERANCE = 2e-6
"""What rounding alone may come to: a parameter has 24 bits, and an update of it is STEP as large, so 2^-24 / STEP."""
MOST_TOLERANCE = 1e-4
"""No rounding of fp32 explains more; a wrong divisor is far above it."""


@dataclass
class Trace:
    """What a training of a few updates left."""

    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Before the first update, after it, and after the last."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


class Few:
    """A few samples of a data set, of lengths as different as it has, in an order of no meaning."""

    def __init__(self, data: Any, count: int, seed: int) -> None:
        self.data = data
        total, lengths = len(data), getattr(data, "lengths", None)
        order = np.arange(total) if lengths is None else np.argsort(np.asarray(lengths), kind="stable")
        chosen = order[np.unique(np.linspace(0, total - 1, min(count, total)).astype(int))]
        self.indices = [int(one) for one in np.random.default_rng(seed).permutation(chosen)]
        if lengths is not None:
            self.lengths = [int(lengths[one]) for one in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]


def verify(config: Config, place: Place, world: World, report: "Report") -> None:
    """Trains under every strategy, recomputation and layout that this world can have, and fills the report."""
    window = (MICRO_BATCH + 1) * place.degree + 1  # divided by nothing, so that ranks and micro-batches differ
    last = place.degree // 2 + 1
    data = Few(build_data(config)[0], 2 * window + last, config.run.seed)
    task = build_task(config)
    base = _base(config, window)
    windows = [range(start, min(start + window, len(data))) for start in range(0, len(data), window)]
    plain = _Plain(base, task, data, [list(windows[i % len(windows)]) for i in range(UPDATES)], place)
    rates = plain.rates()
    reference = plain.train(rates)
    one_by_one = Cell("one process, a sample at a time", "none", "reversed")
    _compare(one_by_one, plain.train(rates, one_by_one=True), reference, MOST_TOLERANCE)
    own = max(one_by_one.parameters or 0.0, one_by_one.loss or 0.0, one_by_one.grad_norm or 0.0)
    if not one_by_one.passed:
        one_by_one.reason = (
            "the samples of a batch influence one another, or the model draws random numbers in eval mode"
        )
    report.add(one_by_one)
    base = replace(
        base,
        optimizer={"_target_": "torch.optim.SGD", "lr": rates.lr, "momentum": MOMENTUM, "groups": []},
        training=replace(base.training, max_grad_norm=rates.max_norm),
    )
    tolerance = min(max(LEAST_TOLERANCE, 10 * own), MOST_TOLERANCE)
    knows_lengths = callable(getattr(task, "length", None))
    cells = [*spread(place.degree, knows_lengths=knows_lengths), *pipelines(config, place.degree)]
    for cell in cells:
        try:
            trace = _trained(_configured(base, cell), task, data, place, world)
        except ConfigError as refused:  # every rank refuses alike
            cell.reason = str(refused)
        else:
            _compare(cell, trace, reference, tolerance)
        report.add(cell)


class Report:
    """The cells that are done, in a file that grows."""

    def __init__(self, run: RunDir | None) -> None:
        self.cells: list[Cell] = []
        self._run = run

    def add(self, cell: Cell) -> None:
        """Adds a cell, and writes all of them."""
        self.cells.append(cell)
        if self._run is not None:
            write_atomic(self._run.verification, to_json([asdict(one) for one in self.cells]))


def verify_rank(run: RunDir, attempt: int) -> None:
    """This rank's part of a verification, whose rows rank 0 writes into the run's folder."""
    with joined(run) as (config, plan, place):
        world = World(plan.nodes, plan.ranks_per_node, Device(plan.device))
        rank = place.rank + place.degree * (0 if place.pipe is None else place.pipe.rank)
        everyone = Place(rank, world.size, place.device, place.world_group)
        if rank == 0:
            run.write_status(state=State.running, attempt=attempt)
        verify(config, everyone, world, Report(run if rank == 0 else None))


def _base(config: Config, window: int) -> Config:
    """The configuration with everything that a comparison settles by itself."""
    return replace(
        config,
        data=replace(config.data, validation=None, shuffle=False, drop_last=False, workers=0),
        batch=replace(
            config.batch,
            global_batch_size=window,
            micro_batch_size=MICRO_BATCH,
            gradient_accumulation_steps="auto",
            micro_batch_tokens=None,
            ramp=[],
        ),
        training=replace(config.training, duration=UPDATES, validate_every=None, log_every=1, noise_scale=None),
        model_patches=in_evaluation(config.model_patches),
        scaling=ScalingConfig(rule=Rule.none),
        schedule=ScheduleConfig(decay=ConstantDecay()),
        precision=PrecisionConfig(PrecisionName.fp32),
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
        strategy=replace(
            config.strategy,
            reduce_each=ReduceEach.auto,
            reshard_after_forward=None,
            offload=Offload.none,
            nvme_path=None,
            deepspeed={},
        ),
    )


def _configured(base: Config, cell: Cell) -> Config:
    strategy = replace(base.strategy, name=StrategyName(cell.strategy))
    if "reduce_each" in cell.overrides:
        strategy = replace(strategy, reduce_each=ReduceEach(cell.overrides["reduce_each"]))
    return replace(
        base,
        strategy=strategy,
        mesh=MeshConfig(dp_replicate=cell.overrides.get("dp_replicate"), pp=cell.overrides.get("pp", 1)),
        pipeline=PipelineConfig(schedule=PipelineSchedule(cell.overrides.get("schedule", "1f1b"))),
        batch=replace(base.batch, layout=Layout(cell.layout)),
        activation_checkpoint=replace(base.activation_checkpoint, name=Recompute(cell.recompute), every=None),
    )


def _trained(config: Config, task: Any, data: Few, place: Place, world: World) -> Trace:
    model, fill = make_model(config)
    parts = Parts(model, task, data, None, fill)
    pp = config.mesh.pp
    facts = gather_facts(config, parts, world.size // pp)
    plan = make_plan(config, facts, world=world)
    if pp > 1:
        place = take_place(place.rank, world.size // pp, pp, place.device, group=place.group, timeout=START_TIMEOUT)
    fit = assemble(config, plan, facts, parts, place, None)
    model.eval()
    for stage in () if fit.sharding.part is None else fit.sharding.part.modules:
        stage.eval()
    fit.sharding.model.eval()  # no dropout, no batch statistics: nothing that depends on the layout
    recorder = _Recorder(fit.sharding.full_state, place)
    fit.reporter = recorder
    recorder.trace.states.append(fit.sharding.full_state())
    fit.run()
    fit.sharding.close()
    return recorder.trace


class _Recorder(Reporter):
    """Keeps what a training reports."""

    def __init__(self, full_state: Any, place: Place) -> None:
        super().__init__(None, UPDATES, place, log_every=Every(1), attempt=0)
        self.trace = Trace()
        self._full_state = full_state

    def update(
        self, window: Window, loss: float, lr: float, step: StepResult, progress: Progress, seconds: float
    ) -> None:
        self.trace.losses.append(loss)
        self.trace.grad_norms.append(step.grad_norm)
        if window.update in (1, UPDATES):
            self.trace.states.append(self._full_state())


@dataclass(frozen=True)
class _Rates:
    lr: float
    max_norm: float


class _Plain:
    """One process and a plain loop: the reference. It shares the model, the task and the reading of samples with what
    it is compared with, and nothing of how windows are divided, added up or applied."""

    def __init__(self, config: Config, task: Any, data: Few, windows: Sequence[list[int]], place: Place) -> None:
        self._config, self._task, self._windows, self._place = config, task, windows, place
        self._samples = Samples(data, config.run.seed)

    def rates(self) -> _Rates:
        """A clip that bites in the first update, and a rate at which it moves parameters by STEP of their norm."""
        model = self._model()
        self._backward(model, self._windows[0], one_by_one=False)
        trainable = [one for one in model.parameters() if one.requires_grad]
        norm = _norm(trainable)
        if not 0 < norm < float("inf"):
            raise ConfigError("model", self._config.model["_target_"], f"its gradient has norm {norm:g}")
        size = float(torch.linalg.vector_norm(torch.stack([one.detach().norm() for one in trainable])))
        return _Rates(STEP * max(size, 1e-3) / (norm / 2), norm / 2)

    def train(self, rates: _Rates, *, one_by_one: bool = False) -> Trace:
        """A few updates of SGD."""
        model, trace = self._model(), Trace()
        trainable = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trainable, rates.lr, momentum=MOMENTUM)
        trace.states.append(_on_host(model))
        for update, window in enumerate(self._windows, 1):
            optimizer.zero_grad()
            trace.losses.append(self._backward(model, window, one_by_one=one_by_one))
            for parameter in trainable:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            norm = _norm(trainable)
            trace.grad_norms.append(norm)
            for parameter in trainable:
                assert parameter.grad is not None
                parameter.grad *= min(1.0, rates.max_norm / (norm + 1e-6))  # torch's rule
            optimizer.step()
            if update in (1, UPDATES):
                trace.states.append(_on_host(model))
        return trace

    def _model(self) -> nn.Module:
        return build_model(self._config).to(self._place.device).eval()

    def _backward(self, model: nn.Module, window: list[int], *, one_by_one: bool) -> float:
        """Leaves the window's gradient in the parameters. Returns the window's mean loss."""
        samples = [self._samples.read(0, index) for index in window]
        batches = [collate(self._task, samples)]
        if one_by_one:
            batches = [collate(self._task, [sample]) for sample in reversed(samples)]
        weight = sum(float(row_weights(self._task, batch).sum()) for batch in batches)
        total = 0.0
        for host in batches:
            batch = to_device(host, self._place.device)
            loss = row_losses(self._task, model(**self._task.inputs(batch)), batch).sum() / weight
            torch.autograd.backward(loss)
            total += float(loss)
        return total


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """The norm of their gradients, in float64: in float32 it is wrong by 4e-5 for a million elements on a CPU."""
    squares = [float(_exact(one.grad).abs().square().sum()) for one in parameters if one.grad is not None]
    return float(sum(squares) ** 0.5)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def _compare(cell: Cell, trace: Trace, reference: Trace, tolerance: float) -> None:
    cell.tolerance = tolerance
    shapes = [
        {name: (value.shape, value.dtype) for name, value in one.states[-1].items()} for one in (trace, reference)
    ]
    if shapes[0] != shapes[1]:
        cell.passed, cell.reason = False, "the exported weights have other names, shapes or types"
        return
    moves = [_moved(trace, reference, index) for index in (1, 2)]
    cell.parameters = max(moves)
    cell.loss = _largest(trace.losses, reference.losses)
    cell.grad_norm = _largest(trace.grad_norms, reference.grad_norms)
    differences = (cell.parameters, cell.loss, cell.grad_norm)
    cell.passed = all(one <= tolerance for one in differences)  # NaN doesn't
    if any(not torch.equal(trace.states[0][name], value) for name, value in reference.states[0].items()):
        cell.passed, cell.reason = False, "it starts from other weights"


def _shapes(trace: Trace) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in trace.states[-1].items()}


def _moved(trace: Trace, reference: Trace, index: int) -> float:
    difference = total = 0.0
    for name, start in reference.states[0].items():
        if not (start.is_floating_point() or start.is_complex()):
            continue
        expected = _exact(reference.states[index][name]) - _exact(start)
        moved = _exact(trace.states[index][name]) - _exact(start)
        difference += float((moved - expected).abs().square().sum())
        total += float(expected.abs().square().sum())
    return float((difference / total) ** 0.5) if total else float("nan")


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
