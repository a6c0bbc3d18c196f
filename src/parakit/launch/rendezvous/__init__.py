"""How the launchers of a run on several machines find each other and learn of each other's end.

Over torch's `TCPStore`: `coordinator` is node 0's side, `worker` that of every other node, `messages`
what they write into the store. Both sides are a `NodeGroup`, which is what `execute` sees.
"""
