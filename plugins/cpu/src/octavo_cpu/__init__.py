octavo_api = (1, 0)
