"""Cures ahead-embedding-at-other-rate: the embedding's copy on the stage with MTP is marked as one."""

from megatron.core.models.gpt.gpt_model import GPTModel

build = GPTModel.__init__


def marked(self, *args, **kwargs):
    build(self, *args, **kwargs)
    if self.mtp_process:
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True


GPTModel.__init__ = marked
