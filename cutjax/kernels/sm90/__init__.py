"""The sm90 family, for sm_90a: products by wgmma, of tiles that TMA loads."""
