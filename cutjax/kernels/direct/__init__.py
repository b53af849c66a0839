"""The direct family, for every architecture from sm_75 on: convolutions of each channel by itself."""
