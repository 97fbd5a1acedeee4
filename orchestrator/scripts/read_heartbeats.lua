-- Looks who of these has said lately that it is alive.
-- Needs: clock.
-- KEYS: heartbeats, each holds its life in ms
-- ARGV: 1 1 to let none last longer than its life, 0 to change nothing
-- Returns: for each 1 alive or 0
local alive = {}
for i, key in ipairs(KEYS) do
  local life = redis.call('GET', key)
  if life and ARGV[1] == '1' then pull_back_key(key, tonumber(life)) end
  alive[i] = life and 1 or 0
end
return alive
