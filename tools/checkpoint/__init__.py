"""What is in a checkpoint, what can load it, and whether two are the same model.

Nothing that a checkpoint's pickles name is run: `tools.records.pickles` reads what they say. Commands
are in `command.py`; `contents.py` reads every format, `checks.py` judges one, `compare.py` two.
"""
