"""The op `latent_attention`: multi-head latent attention (MLA) in absorbed form."""
