package catalog

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// SetEach makes edits of several keys or limits together: all or none, as [Catalog.Set] and
// [Catalog.Unset] make one. It returns them in their order. Each key is edited once, and none is
// [AllKeys]. Errors are those of Set.
func (c *Catalog) SetEach(ctx context.Context, edits ...KeyEdit) (made []Edit, err error) {
	if err := c.usable(); err != nil || len(edits) == 0 {
		return nil, err
	}
	return c.inOrder(edits, func(sorted []KeyEdit) ([]Edit, error) { return c.editOwn(ctx, nil, sorted...) })
}

// SetEachTx is [Catalog.SetEach] inside tx, as [Catalog.SetTx] is Set. It locks the rows of all
// keys before other edits wait for it, so use it in place of several SetTx in one transaction.
func (c *Catalog) SetEachTx(ctx context.Context, tx pgx.Tx, edits ...KeyEdit) ([]Edit, error) {
	if err := c.usable(); err != nil || len(edits) == 0 {
		return nil, err
	}
	return c.inOrder(edits, func(sorted []KeyEdit) ([]Edit, error) { return c.keepTx(ctx, tx, sorted...) })
}

// inOrder calls do with edits in the order in which calls lock their rows, limits with shards last, and
// returns the results in the order of edits.
func (c *Catalog) inOrder(edits []KeyEdit, do func([]KeyEdit) ([]Edit, error)) ([]Edit, error) {
	families := c.families()
	shards := func(e KeyEdit) int {
		if f := families[e.Name]; f != nil && f.published != nil {
			return min(f.published.Shards, 2)
		}
		return 1
	}
	order := make([]int, len(edits))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		return cmp.Or(cmp.Compare(shards(edits[i]), shards(edits[j])), cmp.Compare(edits[i].Name, edits[j].Name), cmp.Compare(edits[i].Key, edits[j].Key))
	})
	sorted := make([]KeyEdit, len(edits))
	for n, i := range order {
		switch sorted[n] = edits[i]; {
		case edits[i].Key == AllKeys:
			return nil, invalid("Key", "AllKeys", "is for an edit by itself")
		case n > 0 && sorted[n-1].Name == edits[i].Name && sorted[n-1].Key == edits[i].Key:
			return nil, invalid("Edits", len(edits), fmt.Sprintf("has two of one key of limit %q", edits[i].Name))
		}
	}
	all, err := do(sorted)
	if err != nil {
		return nil, err
	}
	made := make([]Edit, len(edits))
	for n, i := range order {
		made[i] = all[n]
	}
	return made, nil
}
