"""The documented interface to the frameworks: one configuration, one plan and one JSON file for each combination that runs.

A combination is a framework, a model and a platform. `config` reads config.yaml, `plan` resolves the combinations, `run` trains
them, `result` defines the JSON file, `logs` makes it from logs of Megatron and Primus, and `comparison` compares the files.
"""
