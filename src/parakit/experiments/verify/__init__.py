"""Train two runs of one configuration and compare them tensor by tensor."""
