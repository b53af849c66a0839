"""Operations, a file for each: its arguments, checked, and the product that they become."""
