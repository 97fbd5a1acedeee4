-- Takes or keeps what one holder has at a time: the lead of the reconcilers, a run that one trainer drives.
-- Needs: clock. Needs: held.
-- KEYS: 1 holder
-- ARGV: 1 name, 2 life ms
-- Returns: 1 held, 0 it is another's
local held = redis.call('GET', KEYS[1])
if held then
  local name, life = read_held(held)
  if name ~= ARGV[1] then
    pull_back_key(KEYS[1], life)
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[2])
return 1
