"""The code, including the command-line options, of some `hyperion` commands and of the programs in phase2_development.

The commands are `compare`, `relaunch`, `frameworks` and `port`. The programs are test_nccl.py, compilation_optimization.py and
run_distributed.py.
"""
