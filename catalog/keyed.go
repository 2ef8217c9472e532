package catalog

import (
	"hash/maphash"
	"maps"
)

// parts is the number of parts of a keyed.
const parts = 256

// keyed maps keys to values. It is immutable, and cut into parts, so a changed copy shares all
// parts but those of the changed keys. The zero keyed is empty.
type keyed[V any] struct {
	parts *[parts]map[string]*V
	n     int
}

var seed = maphash.MakeSeed()

func part(key string) int { return int(maphash.String(seed, key) % parts) }

// get returns the value of a key; nil if it has none.
func (k keyed[V]) get(key string) *V {
	if k.parts == nil {
		return nil
	}
	return k.parts[part(key)][key]
}

// all calls do with each value.
func (k keyed[V]) all(do func(*V)) {
	if k.parts == nil {
		return
	}
	for _, part := range k.parts {
		for _, v := range part {
			do(v)
		}
	}
}

// draft is a changed copy of a keyed that is being made.
type draft[V any] struct {
	keyed[V]
	own [parts]bool // the parts that it has copied
}

func (k keyed[V]) draft() *draft[V] {
	d := &draft[V]{keyed: keyed[V]{new([parts]map[string]*V), k.n}}
	if k.parts != nil {
		*d.parts = *k.parts
	}
	return d
}

// set sets the value of a key; nil removes it.
func (d *draft[V]) set(key string, v *V) {
	i := part(key)
	if !d.own[i] {
		d.parts[i], d.own[i] = maps.Clone(d.parts[i]), true
	}
	d.n -= len(d.parts[i])
	if v == nil {
		delete(d.parts[i], key)
	} else {
		if d.parts[i] == nil {
			d.parts[i] = map[string]*V{}
		}
		d.parts[i][key] = v
	}
	d.n += len(d.parts[i])
}
