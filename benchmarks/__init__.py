"""What it costs: measured tables, each from one command.

`python -m benchmarks` runs what a machine without a GPU can run; `benchmarks/gpu.sh` is the GPU's one command.

    launch.py       ranks of a benchmark: own processes, time limits, exit codes
    rounds.py       round robin, medians, quartiles, paired ratios
    gpt2.py         the model of the CPU's cases
    cpu_cases.py    the ways of training one GPT-2: plain, ours, FSDP2
    fsdp2.py        the peer, and how many bytes of model data it holds at its peak
    train_step.py   one training step: ours beside plain PyTorch and beside FSDP2, on the CPU
    machine.py      cores, caches and page sizes, without which no bandwidth can be read
    streams.py      what memory gives: C++ loops over an update's own tensors (csrc/)
    adam.py         Adam on the CPU: our kernels beside the machine's bandwidth, torch and DeepSpeed
    adam_memory.py  the tensors of an update, the same ones for all
    adam_cases.py   what takes turns on them
    adam_report.py  figures, targets; adam_plot.py draws them
    deepspeed_adam.py  DeepSpeedCPUAdam in a process of its own python
    bytes_per_parameter.py  slope of measured bytes over sizes of a model: ours, FSDP2, DeepSpeed
    bytes_cases.py  one size of one system; measured_bytes.py counts storages and asks the system
    llama.py        the model of the GPU's cases
    gpu_case.py     one system at one size on the GPU, in a process of its own
    gpu_table.py    the table of what those processes wrote
"""
