"""Export a trained run to files that are served without jformer: CTranslate2 and StableHLO."""
