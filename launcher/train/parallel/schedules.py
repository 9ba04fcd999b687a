"""The schedules of a pipeline under torch's names."""

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""The names that torch.distributed.pipelining.schedules.get_schedule_class knows them by."""
