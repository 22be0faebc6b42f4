"""Cells of the speed tables: a model's shape, its rows, and every program that trains on them; see ../cell.py."""
