package main

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// otherRoles lists the roles, besides the owner, that can change limits or read their keys.
func (d *doctor) otherRoles(ctx context.Context) error {
	if !d.there {
		return nil
	}
	all, err := d.Rights(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		d.warn(r.Beyond, "other roles", "%s%s", visible.Text(r.String()), when(r.Beyond, ": more than a program needs; docs/setup.md has what to revoke"))
	}
	if len(all) == 0 {
		d.find(fine, "other roles", "none but the owner can write limits, choose a rate, or read keys")
	}
	return nil
}
