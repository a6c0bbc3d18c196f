"""What is in a checkpoint, what can load it, whether two are the same model; one in another strategy.

Nothing that a checkpoint's pickles name is run: `parakit.artifacts.pickles` reads what they say.
`command.py` is `make inspect`: `contents.py` reads every format, where `whole.py` puts pieces of ranks
and layers together; `checks.py` judges one, `compare.py` two. `reshard.py` is `make reshard`, and
`parallelism.py` what the state that all ranks have says of a strategy. `README.md` has what was shown,
and how.
"""
