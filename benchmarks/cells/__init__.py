"""Cells of the speed tables: model shape, rows, and the programs that are compared. See ../cell.py."""
