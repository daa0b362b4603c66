"""The ground floor: errors, files that may come from strangers, weights, processes, code of the user."""
