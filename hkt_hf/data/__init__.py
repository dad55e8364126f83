"""Data sets: ListOps and IMDB. Knows nothing of the model; needs the extra `train`."""
