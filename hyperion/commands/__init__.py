"""Commands with their options: `compare` and `relaunch` of `hyperion.cli`, and the programs of phase2_development."""
