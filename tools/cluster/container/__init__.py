"""The image that GPU runs use: its versions, how it is built, how a run is wrapped in it.

Takes `docker/versions.env` and a command, gives docker's command; `versions` also runs inside any image
by itself. It lies below what composes runs, and imports `checks` alone of this package's siblings.
"""
