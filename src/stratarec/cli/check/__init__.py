"""All that can be checked of something that StrataRec wrote."""
