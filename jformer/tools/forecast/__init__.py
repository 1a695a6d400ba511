"""What a run takes of a machine, before it is spent: parameters, FLOPs, memory, time."""
