"""What it costs: measured tables, each from one command.

`python -m benchmarks` runs what a machine without a GPU can run; `benchmarks/gpu.sh` is the GPU's one command.

    launch.py       ranks of a benchmark: own processes, time limits, exit codes
    rounds.py       round robin, medians, quartiles, paired ratios
    cpu_cases.py    the ways of training one GPT-2: plain, ours, FSDP2
    fsdp2.py        the peer, and how many bytes of model data it holds at its peak
    train_step.py   one training step: ours beside plain PyTorch and beside FSDP2, on the CPU
    llama.py        the model of the GPU's cases
    gpu_case.py     one system at one size on the GPU, in a process of its own
    gpu_table.py    the table of what those processes wrote
"""
