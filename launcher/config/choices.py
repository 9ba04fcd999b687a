"""The values that a key of the configuration chooses from."""

from enum import Enum


class Rule(Enum):
    """How the learning rate follows the batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class DecayRule(Enum):
    """How the weight decay follows the batch."""

    none = "none"
    linear = "linear"


class WarmupFrom(Enum):
    """Where the warmup starts."""

    zero = "zero"
    base_lr = "base_lr"


class BatchNormPatch(Enum):
    """What becomes of a model's batch norm."""

    keep = "keep"
    sync = "sync"
    group_norm = "group_norm"
    ghost = "ghost"


class Layout(Enum):
    """How a window lies over ranks and micro-batches."""

    auto = "auto"
    length = "length"
    arrival = "arrival"


class OnNonfinite(Enum):
    """What an update with non-finite values does."""

    skip = "skip"
    stop = "stop"


class StrategyName(Enum):
    """How parameters, gradients and optimizer states are spread over the data-parallel ranks."""

    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"

    @property
    def shards(self) -> bool:
        """Whether ranks share a copy of what they train."""
        return self not in (StrategyName.single, StrategyName.ddp)

    @property
    def zero_stage(self) -> int:
        """The stage of DeepSpeed's ZeRO; 0: another strategy."""
        return int(self.value[-1]) if self.value.startswith("zero") else 0


class ReduceEach(Enum):
    """When a sharded gradient is reduced."""

    auto = "auto"
    window = "window"
    micro_batch = "micro_batch"


# `1f1b` is no identifier, and a choice is typed by the name of its member
PipelineSchedule = Enum(
    "PipelineSchedule",
    {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "looped_bfs": "looped_bfs",
        "interleaved_zero_bubble": "interleaved_zero_bubble",
        "zbv": "zbv",
    },
)
PipelineSchedule.__doc__ = "The order in which the stages of a pipeline take forwards and backwards."


class Offload(Enum):
    """What waits in the host's memory while it isn't used."""

    none = "none"
    optimizer = "optimizer"
    cpu = "cpu"
    nvme = "nvme"


class Recompute(Enum):
    """Which activations are computed again in the backward instead of being kept."""

    none = "none"
    full = "full"
    selective = "selective"


class LossSpike(Enum):
    """What an update does whose loss lies far above those before it."""

    none = "none"
    skip = "skip"
    rollback = "rollback"


class Resume(Enum):
    """What a start does where its folder already holds a run."""

    never = "never"
    auto = "auto"


class Retry(Enum):
    """Which runs of a sweep run when it goes on."""

    unfinished = "unfinished"
    failed = "failed"


class OnError(Enum):
    """What a checkpoint that can't be written does."""

    go_on = "go_on"
    stop = "stop"


class PrecisionName(Enum):
    """What a forward computes in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(Enum):
    """What the ranks compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class SubmitKind(Enum):
    """Where the ranks start."""

    local = "local"
    slurm = "slurm"
    docker = "docker"


class Pull(Enum):
    """When an image is pulled."""

    missing = "missing"
    always = "always"
    never = "never"


class SlurmAgent(Enum):
    """What starts the ranks on a node of a job."""

    torchrun = "torchrun"
    none = "none"


class ContainerRuntime(Enum):
    """What runs a container in a job."""

    pyxis = "pyxis"
    apptainer = "apptainer"


class WandbMode(Enum):
    """Whether metrics go to wandb."""

    disabled = "disabled"
    offline = "offline"
    online = "online"
