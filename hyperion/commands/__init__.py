"""The code of two commands of `hyperion` (`compare` and `relaunch`) and of the programs in the folder phase2_development.

The programs are test_nccl.py, compilation_optimization.py and run_distributed.py. The modules also define the command-line
options.
"""
