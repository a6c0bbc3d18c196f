"""Two runs of one configuration, compared tensor by tensor."""
