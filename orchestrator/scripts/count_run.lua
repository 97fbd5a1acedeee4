-- Counts a run's open episodes by state, a part of all open ones at a time; some 2 us a row.
-- KEYS: 1 open
-- ARGV: 1 episode key prefix, 2 run id, 3 first rank and 4 last rank of the part
-- Returns: {how many rows were looked at, state, how many of the run are in it, another state, ...}
local names, found = redis.call('ZRANGE', KEYS[1], ARGV[3], ARGV[4]), {}
for _, episode in ipairs(names) do
  local row = redis.call('HMGET', ARGV[1] .. episode, 'run', 'state')
  if row[1] == ARGV[2] and row[2] then found[row[2]] = (found[row[2]] or 0) + 1 end
end
local answer = {#names}
for state, count in pairs(found) do
  table.insert(answer, state)
  table.insert(answer, count)
end
return answer
