"""The image that GPU runs use: its versions, how it is built, how a run is wrapped in it."""
