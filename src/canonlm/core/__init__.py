"""What every other package uses: errors, files that may come from strangers, weights, processes, code of the user."""
