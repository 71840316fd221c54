"""The observatory: a static site made of many certificates, one page a rule and one a target."""
