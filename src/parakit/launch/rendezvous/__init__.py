"""Connect the launchers of a run on several machines, and tell each of them how the others ended.

The launchers communicate over torch's `TCPStore`. `coordinator` is node 0's side, `worker` is the side of
every other node, and `messages` defines what both write into the store. Both sides are a `NodeGroup`, which
is all that `execute` knows of them.
"""
