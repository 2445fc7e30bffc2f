"""What commands print, and their exit codes; `hyperion.cli` has their options."""
