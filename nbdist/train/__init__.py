"""What a cell calls; plain torch objects come out."""
