LOSSES = {}
