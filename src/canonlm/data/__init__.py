"""Samples in files: a Parquet file for a model of one's own (`dump`), and what that model answered (`answers`)."""
