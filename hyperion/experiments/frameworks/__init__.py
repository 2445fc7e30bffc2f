"""Training with other frameworks: equal work or a refusal, then speed."""
