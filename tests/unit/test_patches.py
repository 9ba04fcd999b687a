"""What model_patches.batch_norm makes of a model and of a plan."""

from typing import Any

import pytest
import torch
from configs import config_text
from torch import Tensor, nn

from launcher.config.choices import BatchNormPatch, Device
from launcher.config.schema import ModelPatchesConfig
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.train.batch_norm import GhostBatchNorm, ghosts
from launcher.train.layout import in_order_of_arrival, in_whole_groups
from launcher.train.parts import build_model, defer_model, sketch_model
from launcher.train.patches import in_evaluation, patch_model


def patched(model: nn.Module, kind: str, size: int | None = None) -> nn.Module:
    return patch_model(model, ModelPatchesConfig(BatchNormPatch(kind), size))


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (32, 32), (48, 24), (100, 25), (16, 16), (7, 7), (37, 1), (1, 1)]
)
def test_group_norm_has_32_groups_or_the_largest_divisor_below(channels: int, groups: int) -> None:
    norm = nn.BatchNorm2d(channels, eps=1e-3)
    nn.init.normal_(norm.weight)
    made = patched(nn.Sequential(norm), "group_norm")[0]  # type: ignore[index]
    assert isinstance(made, nn.GroupNorm)
    assert (made.num_groups, made.num_channels, made.eps) == (groups, channels, 1e-3)
    assert made.weight is norm.weight
    assert made.bias is norm.bias
    x = torch.randn(2, channels, 3, 3)
    grouped = x.view(2, groups, -1)
    by_hand = (grouped - grouped.mean(-1, True)) / (grouped.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    expected = by_hand.view_as(x) * norm.weight[:, None, None] + norm.bias[:, None, None]
    assert torch.allclose(made(x), expected, atol=1e-5)


def test_a_norm_without_affine_parameters_stays_so() -> None:
    for kind, size in (("group_norm", None), ("ghost", 2)):
        made = patched(nn.Sequential(nn.BatchNorm1d(4, affine=False)), kind, size)
        assert list(made.parameters()) == []
        assert made(torch.randn(4, 4)).shape == (4, 4)


def test_a_norm_with_two_names_keeps_them() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    made: Any = patched(model, "ghost", 2)
    assert made["a"] is made["b"][0]
    assert isinstance(made["a"], GhostBatchNorm)
    assert isinstance(patched(nn.BatchNorm1d(4), "ghost", 2), GhostBatchNorm)


@pytest.mark.parametrize(("kind", "size"), [("ghost", 4), ("sync", None)])
def test_the_state_keeps_its_names_and_numbers(kind: str, size: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8, momentum=None))
    model(torch.randn(4, 3, 6, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    made = patched(model, kind, size)
    assert all(mine is other for mine, other in zip(made.parameters(), parameters, strict=True))
    after = made.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_keep_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    norm = model[0]
    assert patched(model, "keep") is model
    assert model[0] is norm


@pytest.mark.parametrize("kind", ["sync", "group_norm", "ghost"])
def test_what_cannot_be_replaced_is_refused(kind: str) -> None:
    class Own(nn.BatchNorm2d):
        pass

    for model, says in (
        (nn.Sequential(nn.LayerNorm(4)), "no batch norm"),
        (nn.Sequential(nn.BatchNorm1d(3), Own(3)), "has a Own"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            patched(model, kind, 2)
        assert error.value.key == "model_patches.batch_norm"
    if kind != "group_norm":
        with pytest.raises(ConfigError, match="no running statistics"):
            patched(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), kind, 2)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 4), (7, 3, 4, 4), (1, 3, 4, 4)])
def test_ghost_batch_norm_is_batch_norm_of_each_group(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    plain = kind(3).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    ghost: Any = patched(nn.Sequential(kind(3).double()), "ghost", 2)
    ghost.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    x, out = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)
    for one in ghosts(ghost):
        one.begin_window(len(x), 1)
    found = ghost(x)
    expected = torch.cat([plain(part) for part in x.split(2)])
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    of = [x, *plain.parameters()]
    by_hand = torch.autograd.grad((expected * out).sum(), of)
    mine = torch.autograd.grad((found * out).sum(), [x, *ghost.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in zip(mine, by_hand, strict=True))
    ghost.eval()
    assert torch.allclose(ghost(x), nn.functional.batch_norm(x, ghost[0].running_mean, ghost[0].running_var,
                                                             plain.weight, plain.bias), rtol=1e-12)  # fmt: skip


def running(norm: nn.Module, windows: list[Tensor], layout: Any, degree: int) -> list[Tensor]:
    """The running statistics after these windows on `degree` ranks, averaged after each as the ranks do it."""
    for window in windows:
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        after = []
        for rank in range(degree):
            norm.load_state_dict(before)
            for one in ghosts(norm):
                one.begin_window(len(window), degree)
            for step in layout(len(window))[rank]:
                if step:
                    norm(window[step])
            after.append({name: value.clone() for name, value in norm.state_dict().items()})
        norm.load_state_dict({name: sum(one[name] for one in after) / degree for name in before})
    return [norm.state_dict()[f"0.running_{name}"].clone() for name in ("mean", "var")]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("degree", "micro"), [(1, 4), (1, 8), (2, 4), (2, 8), (3, 4)])
def test_running_statistics_do_not_depend_on_the_layout(degree: int, micro: int, momentum: float | None) -> None:
    torch.manual_seed(0)
    windows = [torch.randn(22, 3, 2, 2, dtype=torch.float64) + k for k in range(3)]

    def norm() -> nn.Module:
        return patched(nn.Sequential(nn.BatchNorm2d(3, momentum=momentum).double()), "ghost", 4)

    def layout(samples: int) -> Any:
        return in_whole_groups(BatchPlan.solve(22, micro, "auto", degree), samples, 4)

    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for number, window in enumerate(windows):
        groups = [part.transpose(0, 1).flatten(1) for part in window.split(4)]
        share = 1 - 0.9**6 if momentum else 6 / (6 * (number + 1))
        mean = (1 - share) * mean + share * torch.stack([one.mean(1) for one in groups]).mean(0)
        var = (1 - share) * var + share * torch.stack([one.var(1) for one in groups]).mean(0)
    found = running(norm(), windows, layout, degree)
    assert torch.allclose(found[0], mean, rtol=1e-12)
    assert torch.allclose(found[1], var, rtol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("micro", [12, 24])
def test_groups_stay_whole_whatever_the_layout(degree: int, size: int, micro: int) -> None:
    for samples in (1, 5, 24, 97, 120):
        batch = BatchPlan.solve(120, micro, "auto", degree)
        layout = in_whole_groups(batch, samples, size)
        assert [len(rank) for rank in layout] == [batch.num_micro_steps(samples)] * degree
        assert [i for rank in layout for step in rank for i in step] == list(range(samples))
        for step in (step for rank in layout for step in rank if step):
            assert step[0] % size == 0
            assert len(step) % size == 0 or step[-1] == samples - 1
            assert len(step) <= micro
        if size == 1:
            assert layout == in_order_of_arrival(batch, samples)


IMAGES = ("model=resnet", "data=digits", "task=classification", "task.num_classes=10")


def notes(*overrides: str, ranks: int = 2, device: Device = Device.cpu, **facts: Any) -> list[str]:
    known = Facts(**{"samples": 1617, "knows_lengths": False, "batch_norm_layers": 20, **facts})
    config = parse(config_text(*IMAGES, "batch.global_batch_size=64", *overrides))
    return [
        one
        for one in make_plan(config, known, world=World(1, ranks, device)).notes
        if "batch norm (" in one or "precise" in one
    ]


GHOST = ("model_patches.batch_norm=ghost", "model_patches.ghost_size=8", "batch.micro_batch_size=16")


def test_the_plan_says_whose_statistics_they_are() -> None:
    (ghost,) = notes(*GHOST)
    assert "those of 8 consecutive samples of a window (the smallest group has 1, which torch refuses" in ghost
    assert "(the smallest group has 8)" in notes(*GHOST, samples=1600)[0]
    (sync,) = notes("model_patches.batch_norm=sync", "batch.micro_batch_size=8", device=Device.cuda, samples=1600)
    assert "one micro-batch on all 2 ranks, 16 samples, so 4 steps are not the same as one batch of 64" in sync
    (whole,) = notes("model_patches.batch_norm=sync", "batch.micro_batch_size=32", device=Device.cuda, samples=1600)
    assert "the whole window, over all 2 ranks, 64 samples" in whole
    assert notes("model_patches.batch_norm=group_norm", batch_norm_layers=0) == []


SAVES = "accumulation saves memory and not time: batch.micro_batch_size=32 makes the same update in 1 step instead of "
HELD = "where the device has the memory for it"


@pytest.mark.parametrize(
    ("overrides", "layers", "says"),
    [
        (["batch.micro_batch_size=8"], 0, [f"{SAVES}4, {HELD}"]),
        (["batch.micro_batch_size=8"], None, [f"{SAVES}4, {HELD}, and the model no batch norm"]),
        (["batch.micro_batch_size=8"], 20, []),
        (["batch.micro_batch_size=8", "model_patches.batch_norm=group_norm"], None, [f"{SAVES}4, {HELD}"]),
        (GHOST, 20, [f"{SAVES}2, {HELD}"]),
        (["batch.micro_batch_size=12", *GHOST[:1], "model_patches.ghost_size=12"], 20, []),
    ],
)
def test_a_larger_micro_batch_is_advised_where_the_update_stays(
    overrides: list[str], layers: int | None, says: list[str]
) -> None:
    config = parse(config_text(*IMAGES, "batch.global_batch_size=64", *overrides))
    facts = Facts(samples=1617, knows_lengths=False, batch_norm_layers=layers)
    found = make_plan(config, facts, world=World(1, 2, Device.cpu)).notes
    assert [one for one in found if one.startswith("accumulation")] == says


def test_the_plan_says_how_many_samples_are_precise() -> None:
    precise = "model_patches.precise_batch_norm"
    # 101 groups of 16 are 1,616 of the 1,617 that there are
    capped = f"{precise}=100000: evaluations take statistics over 1616 samples in groups of 16; data.train has 1617"
    assert notes(f"{precise}=100000", "batch.micro_batch_size=16")[1:] == [capped]
    of_ghosts = f"{precise}=100: evaluations take statistics over 96 samples in groups of 8"
    assert notes(f"{precise}=100", *GHOST)[1:] == [of_ghosts]
    assert notes(f"{precise}=10", "batch.micro_batch_size=16")[1].endswith("over 10 samples in groups of 10")


def test_precise_statistics_are_those_of_one_rank() -> None:
    both = ("model_patches.batch_norm=sync", "model_patches.precise_batch_norm=100", "data.drop_last=true")
    with pytest.raises(ConfigError, match=r"batch_norm=sync takes statistics over all ranks") as error:
        notes(*both, "batch.micro_batch_size=8", device=Device.cuda)
    assert error.value.key == "model_patches.precise_batch_norm"


@pytest.mark.parametrize(
    ("overrides", "facts", "key", "says"),
    [
        (["model_patches.batch_norm=ghost"], {}, "model_patches.ghost_size", "at least 2"),
        (["model_patches.batch_norm=ghost", "model_patches.ghost_size=1"], {}, "model_patches.ghost_size", "least 2"),
        (["model_patches.ghost_size=8"], {}, "model_patches.ghost_size", "has no effect"),
        ([*GHOST, "batch.micro_batch_size=12"], {}, "model_patches.ghost_size", "(?s)=12.*micro_batch_size=8"),
        ([*GHOST, "batch.micro_batch_size=4"], {}, "model_patches.ghost_size", "(?s)=4.*micro_batch_size=8"),
        (GHOST, {"knows_lengths": True}, "model_patches.batch_norm", "batch.layout=arrival"),
        (["model_patches.batch_norm=sync"], {}, "model_patches.batch_norm", "GPUs alone.*on cpu"),
        ([*GHOST, "mesh.pp=2"], {"num_layers": 4, "part_costs": [1] * 6}, "mesh.pp", "batch norm"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], facts: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        notes(*overrides, **facts)
    assert error.value.key == key


def test_synchronised_statistics_count_no_copies() -> None:
    # the last window of 1,617 samples has 17: 9 on one rank and 8 on the other, by 8 a second step of 1 and 0
    sync = ("model_patches.batch_norm=sync", "batch.micro_batch_size=8")
    with pytest.raises(ConfigError, match=r"(?s)window of 17 samples.*data.drop_last=true"):
        notes(*sync, device=Device.cuda)
    assert notes(*sync, "data.drop_last=true", device=Device.cuda)
    with pytest.raises(ConfigError, match=r"batch.layout=arrival"):
        notes(*sync, device=Device.cuda, knows_lengths=True)


@pytest.mark.parametrize("kind", ["group_norm", "ghost"])
def test_the_model_is_patched_where_it_is_built(kind: str) -> None:
    more = ["model_patches.ghost_size=8"] if kind == "ghost" else []
    config = parse(config_text(*IMAGES, f"model_patches.batch_norm={kind}", *more))
    plain = build_model(parse(config_text(*IMAGES)))
    for model in (build_model(config), sketch_model(config)):
        kinds = {type(one) for one in model.modules() if "Norm" in type(one).__name__}
        assert kinds == {nn.GroupNorm if kind == "group_norm" else GhostBatchNorm}
    made = build_model(config)
    for (name, mine), (other, theirs) in zip(made.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs), "a patch draws no random numbers"


@pytest.mark.parametrize("kind", ["group_norm", "ghost"])
def test_a_model_that_is_made_part_by_part_is_patched_alike(kind: str) -> None:
    more = ["model_patches.ghost_size=8"] if kind == "ghost" else []
    config = parse(config_text(*IMAGES, "strategy=fsdp", "model.width=32", f"model_patches.batch_norm={kind}", *more))
    deferred, fill = defer_model(config)
    assert any(one.is_meta for one in deferred.parameters())
    fill(deferred)
    whole = build_model(config).state_dict()
    found = deferred.state_dict()
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_comparison_in_evaluation_leaves_out_what_differs_in_training_alone() -> None:
    for kind in BatchNormPatch:
        patches = ModelPatchesConfig(kind, 8 if kind is BatchNormPatch.ghost else None)
        kept = patches if kind is BatchNormPatch.group_norm else ModelPatchesConfig()
        assert in_evaluation(patches) == kept
