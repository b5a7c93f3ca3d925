"""The gated delta rule of Gated DeltaNet and Kimi Delta Attention."""
