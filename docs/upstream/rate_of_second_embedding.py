"""Cures rate-of-second-embedding: MTP's copy of the embedding is marked as an embedding."""

from megatron.core.models.common.language_module.language_module import LanguageModule

set_up = LanguageModule.setup_embeddings_and_output_layer


def marked(self):
    set_up(self)
    if getattr(self, "mtp_process", False) and hasattr(self, "embedding"):
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True


LanguageModule.setup_embeddings_and_output_layer = marked
