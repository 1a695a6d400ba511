"""A trained run as files that others serve without jformer: CTranslate2 and StableHLO."""
