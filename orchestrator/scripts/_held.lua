-- What one holder has at a time: "name life in ms". A script whose header says "Needs: held" is sent with this before it.

-- Name and life; without a life it is of an older version.
local function read_held(text)
  local name, life = string.match(text, '^(.*) (%d+)$')
  return name or text, tonumber(life)
end
