"""Style, number formats and tables of all figures. Imports no torch."""
