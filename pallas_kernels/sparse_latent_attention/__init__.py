"""The op `sparse_latent_attention`: latent attention (MLA) to chosen tokens only."""
