"""Experiments that compare training frameworks: first whether they do equal work, then how fast they are."""
