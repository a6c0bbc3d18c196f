"""Cures ahead-with-a-second-output: an output layer that multiplies with the embedding has no weight."""

from megatron.core.models.gpt.gpt_model import GPTModel

build = GPTModel.__init__


def without_a_second_one(self, *args, **kwargs):
    build(self, *args, **kwargs)
    if self.post_process and self.mtp_process and self.share_embeddings_and_output_weights:
        self.output_layer.weight = None


GPTModel.__init__ = without_a_second_one
